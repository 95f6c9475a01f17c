"""The rank of this process in its launch, and the agreement of the ranks on a run."""
