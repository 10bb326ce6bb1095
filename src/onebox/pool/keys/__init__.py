"""Keys: whose they are, where they lie, and how two machines come to know each other's."""
