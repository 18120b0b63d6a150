-- close: end a run. For a client, the answer is the result of a request.
-- A worker is fenced by its epoch, because the log has changed since it was replaced.
-- needs: run_close
local args = cjson.decode(ARGV[1])

if args.fence and redis.call('GET', args.fence) ~= args.epoch then
  return 'FENCED'
end
local resolved = close_run(args.prefix, args.run, args.tenant, args.state, args.failure, args.ttl_ms)
if not resolved and redis.call('HGET', 'cotrain:run:' .. args.run, 'state') ~= 'closed' then
  return 'GONE'
end
resolved = resolved or {} -- the run of a copied checkpoint has no log
if args.request then
  put_result(args.request, args.result, args.ttl_ms)
  resolved[#resolved + 1] = args.request
end
redis.call('PUBLISH', 'cotrain:notify:results', table.concat(resolved, '\n'))
return 'OK'
