"""Networks as ONNX graphs, without PyTorch: graph.py writes graphs and runs them, vit.py is the Vision Transformer."""
