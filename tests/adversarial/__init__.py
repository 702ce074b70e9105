"""Inputs chosen to break flexgen, against a dense reference that shares no code with the other tests."""
