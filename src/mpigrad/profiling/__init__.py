"""See what happens: the trace of operations, its table, and the progress line."""
