"""The tests of flexgen, one folder a concern."""
