"""Drivers for projects that have no tests of their own that fit, and what projects are told before their tests."""
