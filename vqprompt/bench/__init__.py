"""The paper's tables and figures, one command each: declared grids of runs, done, resumed, and put beside the paper."""
