"""Device code: functions that kernels call. Every module here needs the DSL; none needs torch."""
