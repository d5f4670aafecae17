# docker build -t keyhole . && docker run --rm keyhole        recovers a random head and shows the result
# docker run --rm -v "$PWD:/data" keyhole recover file:params.safetensors --out run        any other command
FROM python:3.13-slim AS build
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir --constraint constraints.txt --prefix /install '.[report,http,serve,onnx]'

FROM python:3.13-slim
COPY --from=build /install /usr/local
RUN useradd --create-home --uid 1000 keyhole && mkdir /data && chown keyhole /data
USER 1000
WORKDIR /data
ENTRYPOINT ["keyhole"]
CMD ["demo"]
