# GPU image for x86_64 and aarch64 (GH200, GB200, DGX Spark), on top of NVIDIA's PyTorch image.
#
# NOT BUILT HERE: no container engine was available when this file was written. It checks itself while
# it builds: the torch of the base image must stay, and both compiled libraries must load.
#
#   make wheels
#   docker build -f containers/gpu.Dockerfile -t gracetune:gpu --build-arg BASE=nvcr.io/nvidia/pytorch:YY.MM-py3 .
#   docker run --rm -it --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD:/data" gracetune:gpu train run.json
#
# Choose a release (YY.MM) whose torch is 2.12 or newer, including previews such as 2.12.0a0: pip
# orders a preview of 2.11 before 2.11, and gracetune needs at least 2.11.
ARG BASE
FROM ${BASE}
COPY dist/*.whl /wheels/
RUN python -c "import torch; print(torch.__version__)" > /wheels/torch-before \
    && pip install --no-cache-dir "$(ls /wheels/*_$(uname -m).whl)[images,optimizers,video]" \
    && python -c "import torch; print(torch.__version__)" > /wheels/torch-after \
    && cmp /wheels/torch-before /wheels/torch-after \
    && python -c "from gracetune.cli.diagnose import check_libraries as check; assert check().status == 'OK', check()" \
    && rm -r /wheels
WORKDIR /data
ENTRYPOINT ["gracetune"]
