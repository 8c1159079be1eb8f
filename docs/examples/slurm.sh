#!/bin/bash
# Two machines with four GPUs each train as one. Submit from the folder of the project: sbatch docs/examples/slurm.sh
# The folder, the images and --out must be on a file system that both machines see.
#SBATCH --job-name=co2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1          # one torchrun on each machine; it starts a process for each GPU
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=48
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120            # two minutes before the end: finish the step, write a checkpoint
#SBATCH --requeue                    # when the job is pre-empted, put it back into the queue ...
#SBATCH --open-mode=append
#SBATCH --output=co2-%j.log
set -euo pipefail

first_machine=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=1 .venv/bin/torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node 4 \
    --max-restarts 3 \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$first_machine:29500" \
    -m co2 pretrain co2-v2 \
    --data /shared/pictures \
    --out /shared/runs/co2-v2 \
    --network.groups 8 \
    --resume auto                    # ... and go on from the last checkpoint when it starts again
