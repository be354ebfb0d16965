# CPU image for x86_64 and aarch64: to try gracetune, prepare run files and convert adapters.
#
# NOT BUILT HERE: no container engine was available when this file was written. It checks itself while
# it builds: both compiled libraries must load.
#
#   make wheels
#   docker build -f containers/cpu.Dockerfile -t gracetune:cpu .
#   docker run --rm -it -v "$PWD:/data" gracetune:cpu examples
FROM python:3.12-slim
COPY dist/*.whl /wheels/
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu \
    && pip install --no-cache-dir "$(ls /wheels/*_$(uname -m).whl)[images,video]" \
    && python -c "from gracetune.cli.diagnose import check_libraries as check; assert check().status == 'OK', check()" \
    && rm -r /wheels
WORKDIR /data
ENTRYPOINT ["gracetune"]
