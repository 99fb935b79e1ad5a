"""Training in several processes; the only package that imports torch.distributed."""

from compressive.distributed.collectives import (
    Pending as Pending,
)
from compressive.distributed.collectives import (
    all_sum as all_sum,
)
from compressive.distributed.collectives import (
    any_process as any_process,
)
from compressive.distributed.collectives import (
    check_equal_rows as check_equal_rows,
)
from compressive.distributed.collectives import (
    exchange_rows as exchange_rows,
)
from compressive.distributed.collectives import (
    gather as gather,
)
from compressive.distributed.collectives import (
    gather_objects as gather_objects,
)
from compressive.distributed.collectives import (
    mean_value as mean_value,
)
from compressive.distributed.collectives import (
    start_gather as start_gather,
)
from compressive.distributed.collectives import (
    start_sum_to_owners as start_sum_to_owners,
)
from compressive.distributed.collectives import (
    sum_in_group as sum_in_group,
)
from compressive.distributed.machines import (
    Leaders as Leaders,
)
from compressive.distributed.machines import (
    machine_leaders as machine_leaders,
)
from compressive.distributed.process_group import (
    consecutive_ranks as consecutive_ranks,
)
from compressive.distributed.process_group import (
    failed_ranks as failed_ranks,
)
from compressive.distributed.process_group import (
    is_spare as is_spare,
)
from compressive.distributed.process_group import (
    launched as launched,
)
from compressive.distributed.process_group import (
    rank as rank,
)
from compressive.distributed.process_group import (
    rank_group as rank_group,
)
from compressive.distributed.process_group import (
    spare_note as spare_note,
)
from compressive.distributed.process_group import (
    start as start,
)
from compressive.distributed.process_group import (
    stop as stop,
)
from compressive.distributed.process_group import (
    wait_as_spare as wait_as_spare,
)
from compressive.distributed.process_group import (
    wait_for_all as wait_for_all,
)
from compressive.distributed.process_group import (
    watchdog_notes as watchdog_notes,
)
from compressive.distributed.process_group import (
    world_size as world_size,
)
from compressive.distributed.sharded import (
    empty_shard as empty_shard,
)
from compressive.distributed.sharded import (
    is_sharded as is_sharded,
)
from compressive.distributed.sharded import (
    local_shard as local_shard,
)
from compressive.distributed.sharded import (
    parallel as parallel,
)
from compressive.distributed.sharded import (
    read_shards as read_shards,
)
from compressive.distributed.sharded import (
    shard as shard,
)
from compressive.distributed.sharded import (
    shard_like as shard_like,
)
from compressive.distributed.sharded import (
    whole_tensor as whole_tensor,
)
from compressive.distributed.sharded import (
    write_shards as write_shards,
)
