"""Checks a folder of images before they are taught: copies, doubtful labels, outliers, images that cannot be read.

check.py does the whole check, findings.py says and shows what it finds. neighbours.py finds similar images, copies.py
decides which of them are copies, doubts.py finds labels and images that do not fit, pixels.py finds blank, dark,
over-exposed, blurred and foreign ones.
"""
