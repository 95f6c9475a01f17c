"""What launches are made of: the program, clean variables, and those of each launcher."""

import json
import os
from pathlib import Path

PROGRAM = Path(__file__).with_name("rank_program.py")
FOREIGN = ("QUARK_", "SLURM_", "OMPI_", "PMI", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_RANK")


def clean_environment(**variables):
    kept = {name: v for name, v in os.environ.items() if not name.startswith(FOREIGN)}
    kept |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # On a busy machine the ranks of a launch come, and have delivered, one long after the other.
    kept |= {"QUARK_LAUNCH_TIMEOUT_SECONDS": "90", "QUARK_EXIT_TIMEOUT_SECONDS": "100"}
    return kept | {name: str(value) for name, value in variables.items()}


def read_lines(text):
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda line: (line["restart"], line["rank"]))


ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"}


def slurm(rank, size=3, **others):
    return {
        "SLURM_JOB_ID": 4711,
        "SLURM_STEP_ID": 0,
        "SLURM_CLUSTER_NAME": "c",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NTASKS": size,
        **others,
    }


def openmpi(rank, size=3, **others):
    return {
        "PMIX_NAMESPACE": "prterun-node-812@1",
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": size,
        **others,
    }


def older_openmpi(rank, size=3):
    address = "1234;tcp://10.0.0.1:45621"
    values = openmpi(rank, size, OMPI_MCA_orte_hnp_uri=address, OMPI_MCA_ess_base_jobid=1234)
    del values["PMIX_NAMESPACE"]
    return values


def pmi(rank, size=3):
    # Of no id of the job anybody knows, all ranks have one parent.
    return {
        "PMI_RANK": rank,
        "PMI_SIZE": size,
        "MPI_LOCALRANKID": rank,
        "MPI_LOCALNRANKS": size,
    }


def by_hand(rank, size=3):
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, **ADDRESS}
