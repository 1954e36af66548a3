"""What compares methods: the methods, their training, data sets, runs, reports and the paper's tables."""
