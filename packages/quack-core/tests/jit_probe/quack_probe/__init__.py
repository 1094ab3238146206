"""A first-party package as small as one can be, for the tests of compiling and caching."""
