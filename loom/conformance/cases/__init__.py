"""Drivers for projects without suitable tests of their own, and preparations of projects before their tests."""
