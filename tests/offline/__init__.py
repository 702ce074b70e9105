"""Every kernel golden and every mod of the corpus, compiled offline to machine code and checked for facts."""
