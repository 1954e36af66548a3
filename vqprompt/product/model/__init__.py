"""A model that keeps learning: one file that is taught classes today and more classes next month.

`vqprompt.Model` (model.py) is the public class. records.py has what is remembered of a class, closed_form.py turns it
into a classifier, calibration.py makes percentages reliable and recognizes unknown images, file.py reads and writes the
file, pictures.py finds images and their labels, features.py computes their features.
"""
