// Whatever the page is asked to load by its own address, it shows this server's document and asks no validator.
SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  docExpansion: "list",
  queryConfigEnabled: false,
  validatorUrl: null,
});
