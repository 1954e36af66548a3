"""The living model: one file that is taught classes today and more of them next month.

`vqprompt.Model` (model.py) is the public class. records.py holds what is remembered of a class, closed_form.py turns it
into a classifier, calibration.py makes percentages believable and recognizes what is unknown, file.py is the file,
pictures.py finds images and their labels, features.py shows them to the backbone.
"""
