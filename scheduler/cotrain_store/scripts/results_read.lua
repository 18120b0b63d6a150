-- results_read: clients have these results: they need not be kept as long.
-- needs: ages
local args = cjson.decode(ARGV[1])

for _, request in ipairs(args.requests) do
  end_sooner('cotrain:result:' .. request, args.ttl_ms)
end
return 'OK'
