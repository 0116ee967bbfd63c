"""The first configuration of a data set: what a folder contains, the captions' language, and a YAML file that runs."""
