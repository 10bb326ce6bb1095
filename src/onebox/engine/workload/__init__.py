"""Values of a training task that no plan changes: batches, captures, the loss reduction, named parameters, optimizers;
nothing about devices."""
