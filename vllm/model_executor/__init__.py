"""Models, layers and weight loading."""
