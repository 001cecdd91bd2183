"""Real implementations that tests use instead of mocks: blobs, clocks, observers, and registries with faults."""
