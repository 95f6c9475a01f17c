"""An exam for the analyzers' rules: real small trainings, with faults put in, and healthy ones."""
