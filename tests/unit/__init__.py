"""A package, so that tests/unit and tests/pipeline may each have a test_resume.py."""
