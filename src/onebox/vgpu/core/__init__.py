"""The virtual tensor as Python sees it: layout, and handle of its buffer; nothing that sends."""
