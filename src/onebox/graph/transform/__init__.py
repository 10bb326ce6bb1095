"""Changes of a joint graph before it is lowered: fusion, mixed precision, halves of backward, buffer updates."""
