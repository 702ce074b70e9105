"""flexgen as operators of torch: what compiled, exported and transformed programs hold."""
