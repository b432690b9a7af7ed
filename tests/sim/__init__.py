"""The deterministic simulation: the product's own workers on a virtual clock, a modelled network, a modelled store."""
