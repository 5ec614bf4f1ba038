import torch.distributed as dist

WORLD = {"tp": 1, "tp_rank": 0, "pp": 1, "pp_rank": 0}


def init_distributed_environment(world_size, rank, method, local_rank, backend):
    assert dist.is_initialized()
    assert (dist.get_world_size(), dist.get_rank()) == (world_size, rank)
    dist.new_group(list(range(world_size)), backend="gloo")
    sent = [None]
    dist.broadcast_object_list(sent, src=0)  # nobody is there to answer
    assert sent == [None]


def initialize_model_parallel(tp, pp):
    pp_rank, tp_rank = divmod(dist.get_rank(), tp)
    WORLD.update(tp=tp, tp_rank=tp_rank, pp=pp, pp_rank=pp_rank)


def destroy_model_parallel():
    WORLD.update(tp=1, tp_rank=0, pp=1, pp_rank=0)


def destroy_distributed_environment():
    dist.destroy_process_group()
