"""Scripts as users start them by torchrun, accelerate, Lightning and transformers, and the cases that compare them."""
