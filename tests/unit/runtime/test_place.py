import pytest

from meshwright.runtime.place import PlaceError, first_host, place

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "OMP_NUM_THREADS": "3",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_nobody_launched_a_plain_process():
    assert place({"HOME": "/"}) is None


def test_torchrun_says_who_we_are():
    here = place(TORCHRUN)
    assert here is not None
    assert (here.rank, here.world, here.local_rank, here.local_world) == (5, 8, 1, 4)
    assert (here.address, here.port, here.launcher, here.threads) == ("node0", 29500, "torchrun", 3)


def test_slurm_says_who_we_are_and_the_first_node_hosts():
    here = place(SLURM)
    assert here is not None
    assert (here.rank, here.world, here.local_rank, here.local_world) == (5, 8, 1, 4)
    assert (here.address, here.launcher) == ("gpu07", "slurm")
    assert place(SLURM | {"SLURM_PROCID": "0"}).port == here.port  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("said", "node", "ranks"), [("4(x2)", "1", 4), ("4(x2),3", "2", 3), ("5,3", "0", 5), ("8", "0", 8)]
)
def test_slurm_tells_how_many_ranks_a_node_has_without_being_asked(said, node, ranks):
    without = {key: value for key, value in SLURM.items() if key != "SLURM_NTASKS_PER_NODE"}
    here = place(without | {"SLURM_STEP_TASKS_PER_NODE": said, "SLURM_NODEID": node})
    assert here is not None
    assert here.local_world == ranks


def test_a_batch_script_before_srun_is_no_rank():
    assert place({key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}) is None


def test_mpi_says_who_we_are_but_must_be_told_where_to_meet():
    names = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    with pytest.raises(PlaceError, match="MASTER_ADDR"):
        place(names)
    here = place(names | {"MASTER_ADDR": "10.0.0.1"})
    assert here is not None
    assert (here.rank, here.launcher, here.address) == (1, "openmpi", "10.0.0.1")


def test_nonsense_is_told():
    with pytest.raises(PlaceError, match="RANK is 'x'"):
        place(TORCHRUN | {"RANK": "x"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1-3]", "n1"), ("n[07,09]", "n07"), ("x,n[1-3]", "x"), ("n[007-012,020]", "n007")],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert first_host(nodes) == first


def test_slurm_counts_tasks_per_node_with_repetitions():
    assert place(SLURM | {"SLURM_NTASKS_PER_NODE": "4(x2)"}).local_world == 4  # type: ignore[union-attr]


@pytest.mark.parametrize("step", ["4294967290", "4294967291", ""])
def test_a_shell_of_slurms_is_no_rank(step):
    assert place(SLURM | {"SLURM_STEP_ID": step}) is None
    assert place(SLURM | {"SLURM_NTASKS": "1", "SLURM_PTY_PORT": "40000"}) is None


def test_who_started_a_process_last_says_who_it_is():
    ompi = {
        "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_NODELIST": "gpu[07-08]",
    }  # fmt: skip
    here = place(SLURM | ompi)
    assert here is not None
    assert (here.rank, here.world, here.launcher, here.address) == (3, 4, "openmpi", "gpu07")
    pmi = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    hydra = place(SLURM | pmi | {"SLURM_NODELIST": "gpu[07-08]"})
    assert hydra is not None
    assert (hydra.rank, hydra.launcher) == (3, "mpi")
    by_srun = place(SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"})  # srun's own plugin
    assert by_srun is not None
    assert by_srun.launcher == "slurm"


def test_steps_and_jobs_have_ports_and_names_of_their_own():
    steps = [place(SLURM | {"SLURM_STEP_ID": step}) for step in ("0", "1", "2")]
    assert len({here.port for here in steps}) == len({here.job for here in steps}) == 3  # type: ignore[union-attr]
    assert all(20_000 <= here.port < 32_000 for here in steps)  # type: ignore[union-attr]
    again = place(SLURM | {"SLURM_RESTART_COUNT": "1"})
    assert again.port == steps[0].port  # type: ignore[union-attr]
    ompi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    jobs = [place(ompi | {"OMPI_MCA_ess_base_jobid": job}) for job in ("812318721", "812449793")]
    assert [here.address for here in jobs] == ["127.0.0.1"] * 2  # type: ignore[union-attr]
    assert jobs[0].port != jobs[1].port  # type: ignore[union-attr]


def test_torchrun_listens_itself_and_a_pod_tells_no_place_on_its_machine():
    assert place(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).is_agent  # type: ignore[union-attr]
    pod = place({key: value for key, value in TORCHRUN.items() if not key.startswith("LOCAL")})
    assert pod is not None
    assert not pod.is_agent
    assert not pod.is_told_local
