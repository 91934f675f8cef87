"""Imported by shows.py."""
