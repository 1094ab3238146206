"""Tools for testing kernels: accuracy, inputs, GPU records, cubins. Import the module you need."""
