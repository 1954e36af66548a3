"""Takes a model elsewhere: onnx.py writes it for other runtimes, hub.py shares it on the Hugging Face hub."""
