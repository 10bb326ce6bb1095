"""Activation policies: costs, the solver for one device, application to layouts, explanations."""
