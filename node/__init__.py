"""Volunteer's program: train, exchange, store, show."""
