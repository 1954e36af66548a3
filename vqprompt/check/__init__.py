"""Looks through a folder of images before they are taught: copies, doubtful labels, strangers, what cannot be read.

check.py is the whole of it. neighbours.py finds what is near, copies.py tells copies from images that are merely alike,
doubts.py finds labels and images that do not fit, page.py shows it all.
"""
