"""Objectives that train with PyTorch, and the loop they share."""
