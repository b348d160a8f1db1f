"""What runs an offloaded forward: the engines, their flow and books, speculation, the hooks into a model."""
