"""Networks as ONNX graphs, without PyTorch: file.py writes graphs and opens them, vit.py is the Vision Transformer."""
