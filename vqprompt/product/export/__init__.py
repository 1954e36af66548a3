"""Takes a model elsewhere: onnx.py writes it for other runtimes, web_page.py as a page that answers in any browser."""
