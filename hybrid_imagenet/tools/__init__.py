"""The commands beside training; nothing imports them."""
