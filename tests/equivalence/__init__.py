"""A package, so that tests/equivalence and tests/pipeline may each have a test_faults.py."""
