"""A model that keeps learning: one file that is taught classes today and more classes next month.

`vqprompt.Model` (model.py) is the public class. What it knows is a value (knowledge.py) that never changes: a change
makes a new version. A teaching finds pictures (pictures.py), computes features (extractor.py, features.py), and adds
them up to records of classes (ingest.py, records.py), from which a classifier is solved (closed_form.py,
calibration.py). file.py writes and reads the file; description.py says what may be in it.
"""
