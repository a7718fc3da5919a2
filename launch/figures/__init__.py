"""The paper's figures: runs of simulated clusters, expectations and verdicts, tables, CSV and PNG files."""
