"""Tests that compare what flexgen says and emits with golden files, from one op to whole kernels."""
