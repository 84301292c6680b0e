"""Sources: one module per form in which people keep images."""
