"""How Atoll's processes talk: addresses, framed connections, and the data port for bulk bytes."""
