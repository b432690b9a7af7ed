"""Upkeep and the operators' long jobs. They give orders to the owners and never write a session themselves."""
